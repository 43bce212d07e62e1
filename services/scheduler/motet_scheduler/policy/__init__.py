"""What the scheduler decides, without sockets, messages and clock: events and the time go in, effects come out.

No sockets, no clocks, no tasks: the service around it reads messages into events and writes effects into messages, and
the simulator does the same with a virtual clock.
"""
