"""A script that trains on two ranks, of which rank 1 ends in the middle of a step."""

TRAIN = """
    import os, signal, sys, time, torch
    from drivetrain import Accelerator
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range({at} + 2):
        loss = model(torch.ones(2, 2)).mean()
        accelerator.backward(loss)
        if step == {at} and accelerator.process_index == 1:
            {end}
        optimizer.step()
        accelerator.gather(loss)
"""
"""``end`` is what rank 1 does at step ``at``, in line 11; line 13 is where rank 0 waits for it."""
