"""What nodes send each other of their momenta: one file for each way, behind one small interface."""
