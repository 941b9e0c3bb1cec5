"""What a step really takes: recorded timelines, traces, and cost models measured on this machine."""
