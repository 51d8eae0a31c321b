"""Trains in a process that it starts: ``children.py METHOD``."""

import multiprocessing
import sys

import torch


def train():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    print(type(optimizer).__name__)


if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=train)
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
