"""A stand-in for scripts with a ``LightningModule``: ``lightning_fit.py WEIGHTS``."""

import sys
import tempfile

import lightning
import torch
from torch import nn


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0, verbose=False)
module = Module()
loader = torch.utils.data.DataLoader(torch.randn(64, 32), batch_size=4)
with tempfile.TemporaryDirectory() as folder:
    flags = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=folder, gradient_clip_val=1.0, **flags
    )
    trainer.fit(module, loader)
    trainer.save_checkpoint(sys.argv[1], weights_only=True)
torch.save({"model": torch.load(sys.argv[1], weights_only=True)["state_dict"]}, sys.argv[1])
