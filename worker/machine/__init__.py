"""This machine: the images on it, and whether it is fit to run sandboxes."""
