"""Runs programs: the ops of one rank, in order, on the lanes that the schedule chose."""
