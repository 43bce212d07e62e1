"""What the supervisor decides, without sockets, messages and clock: events and the time go in, effects come out."""
