"""Every public name of the lab. `policyloss_lab` imports this module when one of them is used."""

from policyloss_lab import report as report
from policyloss_lab.attachment import Attachment as Attachment
from policyloss_lab.attachment import RunHaltedError as RunHaltedError
from policyloss_lab.diagnosis.distributions import DistributionGap as DistributionGap
from policyloss_lab.diagnosis.distributions import compare_distributions as compare_distributions
from policyloss_lab.diagnosis.run_doctor import RunDiagnosis as RunDiagnosis
from policyloss_lab.diagnosis.run_doctor import doctor_run as doctor_run
from policyloss_lab.diagnosis.tokens import doctor as doctor
from policyloss_lab.diagnosis.tokens import doctor_batch as doctor_batch
from policyloss_lab.diagnosis.verdict import Diagnosis as Diagnosis
from policyloss_lab.runs.recorder import Recorder as Recorder
from policyloss_lab.trainers import attach as attach
from policyloss_lab.whatif import WhatIf as WhatIf
from policyloss_lab.whatif import what_if as what_if
