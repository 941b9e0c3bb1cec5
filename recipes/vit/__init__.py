"""A vision transformer on a folder of images."""
