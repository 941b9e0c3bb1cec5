"""The command ``lightning-muon``."""
