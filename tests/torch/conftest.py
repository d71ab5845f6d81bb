"""Settings for tests that compute with torch."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # small models: threads would wait for each other, above all beside other tests
