"""One-line mistakes in the trainer, as `Mutant`s of mutants.py:
name, file, old, new, and the test that must notice.
"""

from __future__ import annotations

_DISK, _FAULTS, _DOORS = (
    "test_train_durability.py::",
    "test_train_faults.py::",
    "test_train_doors.py::",
)
TRAIN = (
    (
        "reference_not_restored",
        "train/learner.py",
        'load_weights(weights(self.reference), subtree(tensors, "reference"))',
        "pass",
        _DISK + "test_the_reference_of_a_resumed_run_is_the_one_it_had",
    ),
    (
        "old_not_brought_back",
        "train/run/checkpoint_folder.py",
        "os.replace(path, published_path(folder, step_of(path)))",
        "pass",
        _DISK + "test_one_that_stepped_aside_is_brought_back_before_anything_is_deleted",
    ),
    (
        "lock_no_flock",
        "train/run/lock.py",
        "fcntl.flock(handle, fcntl.LOCK_EX)",
        "pass",
        _DISK + "test_two_that_meet_a_dead_lock_take_it_one_after_the_other",
    ),
    (
        "no_fsync_of_tensors",
        "train/run/checkpoint.py",
        "    sync(path)\n",
        "    pass\n",
        _DISK + "test_a_checkpoint_that_is_written_outlives_a_crash",
    ),
    (
        "no_fsync_of_the_folder",
        "train/run/checkpoint.py",
        "    sync(temporary)\n",
        "    pass\n",
        _DISK + "test_a_checkpoint_that_is_written_outlives_a_crash",
    ),
    (
        "no_fsync_of_the_parent",
        "train/run/checkpoint_folder.py",
        "    sync(path.parent)\n",
        "    pass\n",
        _DISK + "test_a_checkpoint_that_is_written_outlives_a_crash",
    ),
    (
        "no_fsync_of_the_index",
        "train/run/atomic.py",
        "os.fsync(file.fileno())",
        "pass",
        _DISK + "test_a_checkpoint_that_is_written_outlives_a_crash",
    ),
    (
        "no_fsync_of_a_replaced_name",
        "train/run/atomic.py",
        "        sync(path.parent)\n",
        "        pass\n",
        _DISK + "test_a_file_that_is_replaced_outlives_a_crash",
    ),
    (
        "no_fsync_of_new_folders",
        "train/run/atomic.py",
        "sync(folder.parent)",
        "pass",
        _DISK + "test_a_checkpoint_that_is_written_outlives_a_crash",
    ),
    (
        "no_fsync_of_lines_before_a_checkpoint",
        "train/run/directory.py",
        "lines.sync()",
        "pass",
        _DISK + "test_the_lines_of_a_run_are_safe_before_its_checkpoint",
    ),
    (
        "no_fsync_of_the_names_of_lines",
        "train/run/directory.py",
        "            sync(self.path)",
        "            pass",
        _DISK + "test_the_lines_of_a_run_are_safe_before_its_checkpoint",
    ),
    (
        "no_fsync_of_lines_that_are_cut",
        "train/run/records.py",
        "            os.fsync(self._handle)\n",
        "            pass\n",
        _DISK + "test_lines_that_were_synced_or_closed_outlive_a_crash",
    ),
    (
        "no_fsync_of_names_on_close",
        "train/run/records.py",
        "        sync(self.path.parent)",
        "        pass",
        _DISK + "test_lines_that_were_synced_or_closed_outlive_a_crash",
    ),
    (
        "a_nan_step_is_applied",
        "train/learner.py",
        "good = math.isfinite(norm) and math.isfinite(loss)",
        "good = True",
        _FAULTS + "test_an_update_that_is_not_finite_is_skipped",
    ),
    (
        "links_are_followed",
        "train/run/plain_files.py",
        "if kind not in (stat.S_IFREG, stat.S_IFDIR):",
        "if False:",
        _DOORS + "test_nothing_is_written_through_a_link",
    ),
    (
        "pieces_may_overlap",
        "train/run/shards.py",
        'if piece["first"] != next_row:',
        "if False:",
        "test_train_checkpoint.py::test_pieces_that_are_not_the_rows_of_a_tensor",
    ),
    (
        "tied_weights_are_written_twice",
        "train/run/checkpoint.py",
        "if earlier != name:",
        "if False:",
        "test_train_checkpoint.py::test_everything_comes_back",
    ),
    (
        "ranks_share_by_group_number",
        "train/completions.py",
        "s.group % prompts % world == rank",
        "s.group % world == rank",
        "test_train_completions.py::test_the_share_of_a_rank",
    ),
)
