"""The directory of a run: its files, its lock, its checkpoints, and how a run goes on from them.

`report` imports `lock` from here, so this package imports nothing by itself.
"""
