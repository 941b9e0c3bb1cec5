"""Plans in pure Python: numbers in, frozen data out."""
