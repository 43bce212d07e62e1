"""Engines that others have written, each in a process with an environment of its own, behind `interface.Engine`."""
