"""GPT pretraining on text of your own: Lightning, Accelerate, two nodes over a slow link, a pipeline."""
