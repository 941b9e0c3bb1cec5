"""Measurements of steps: recorded timelines, traces, and cost models measured on this machine."""
