"""Vowels: a small transformer puts the vowels back into English sentences; AdamW and Muon on the same budget."""
