"""Trials: the services in a simulated world, what a plan does to them, and what must hold."""
