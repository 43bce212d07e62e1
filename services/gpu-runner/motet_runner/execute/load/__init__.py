"""Turns a folder of files into a model that we serve right, or into the reason why not. Only ropes whose frequencies
depend on a length run here during requests."""
