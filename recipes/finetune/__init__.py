"""Fine-tuning of a causal language model of transformers: all weights, or LoRA by PEFT."""
