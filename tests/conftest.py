"""One thread a test process: two run side by side, and small tensors gain nothing from more."""

import torch

torch.set_num_threads(1)
