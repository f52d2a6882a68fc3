"""Every public name of the lab. `policyloss_lab` imports this module when one of them is used."""

from policyloss_lab import report
from policyloss_lab.attachment import Attachment, RunHaltedError
from policyloss_lab.diagnosis import (
    Diagnosis,
    DistributionGap,
    RunDiagnosis,
    compare_distributions,
    doctor,
    doctor_batch,
    doctor_run,
)
from policyloss_lab.runs.recorder import Recorder
from policyloss_lab.trainers import attach
from policyloss_lab.whatif import WhatIf, what_if

__all__ = [
    "Attachment",
    "Diagnosis",
    "DistributionGap",
    "Recorder",
    "RunDiagnosis",
    "RunHaltedError",
    "WhatIf",
    "attach",
    "compare_distributions",
    "doctor",
    "doctor_batch",
    "doctor_run",
    "report",
    "what_if",
]
