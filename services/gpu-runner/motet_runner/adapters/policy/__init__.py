"""What a runner does about adapters, without threads, files, sockets and clock: events and the time go in, effects come
out. `adapter_policy.py` has the table of states and events."""
