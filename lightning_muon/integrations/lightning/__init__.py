"""The strategies of a Lightning Trainer."""
