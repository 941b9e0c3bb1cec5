"""Programs that train real models with lightning-muon."""
