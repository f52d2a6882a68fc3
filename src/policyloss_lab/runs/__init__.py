"""The files of a run directory: lock, lines and checks, and the `Recorder` that writes them."""
