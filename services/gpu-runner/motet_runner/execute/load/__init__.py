"""Loads a model from a folder of files, or says why Motet cannot serve it. Of this folder's code, only `length_rope`
runs during requests."""
