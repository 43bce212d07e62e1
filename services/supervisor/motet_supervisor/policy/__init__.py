"""What the supervisor decides, and nothing of how it hears or says it: events and the time go in, effects come out."""
