"""One update, and a checkpoint for the commands of the page."""

inputs, labels = next(iter(loader))
accelerator.backward(nn.functional.mse_loss(model(inputs), labels))
optimizer.step()
scheduler.step()
optimizer.zero_grad()
accelerator.save_state("runs/one")
