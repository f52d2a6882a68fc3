"""The files of a run directory: who may write them, how they are read, and the `Recorder`."""
