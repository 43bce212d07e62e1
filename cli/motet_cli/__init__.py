"""`motet up`, `down`, `status`, `chat`; and the model that comes with it."""
