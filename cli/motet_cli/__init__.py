"""The command line: `motet up`, `down`, `status`, `chat` and `key`; and the bundled model, in the folder `bundled`."""
