"""What is told about the machine can be written and compared."""

from __future__ import annotations

import json

import torch

from layerskip.comparison.machine import describe_machine, processor
from tests import kit


def test_it_names_processor_threads_type_and_versions() -> None:
    found = describe_machine(kit.l4().to(torch.bfloat16))
    assert json.loads(json.dumps(found)) == found
    assert (found["processor"], found["threads"]) == (processor(), torch.get_num_threads())
    assert (found["device"], found["device_name"], found["dtype"]) == ("cpu", None, "bfloat16")
    assert found["versions"]["torch"] == torch.__version__
    assert processor()
