"""A stand-in for scripts with a loop of their own, such as nanoGPT: ``loop.py WEIGHTS [compile BACKEND]``."""

import inspect
import sys

import torch
from torch import nn
from torch.optim import AdamW


class OwnAdamW(torch.optim.AdamW):
    """A rule of the program."""


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
head, critic, gate, actor = (nn.Linear(32, 8) for _ in range(4))
fused = {"fused": None} if "fused" in inspect.signature(torch.optim.AdamW).parameters else {}
groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": (model[0].bias, model[2].bias)}]
groups[1]["weight_decay"] = 0.0
by_import = AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **fused)
by_name = torch.optim.Adam(head.named_parameters(), 2e-3)
others = [
    torch.optim.Adam(critic.parameters(), weight_decay=0.1),
    torch.optim.SGD(gate.parameters(), lr=0.1),
    OwnAdamW(actor.parameters()),
]
assert isinstance(by_import, torch.optim.AdamW)
assert isinstance(by_import, AdamW)
assert isinstance(by_name, torch.optim.Adam)
assert isinstance(others[2], torch.optim.AdamW)
assert issubclass(torch.optim.AdamW, torch.optim.Optimizer)
schedule = torch.optim.lr_scheduler.LambdaLR(by_import, lambda step: 0.99**step)
call = torch.compile(model, backend=sys.argv[3]) if len(sys.argv) > 3 else model
for _ in range(10):
    hidden = call(torch.randn(8, 32))
    sum(each(hidden).square().mean() for each in (head, critic, gate, actor)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in (by_import, by_name, *others):
        optimizer.step()
        optimizer.zero_grad()
    schedule.step()
names = {"model": model, "head": head, "critic": critic, "gate": gate, "actor": actor}
torch.save({name: module.state_dict() for name, module in names.items()}, sys.argv[1])
