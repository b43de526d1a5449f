"""What others add and how others call: plugins, pipeline files, passes of torch, torch.compile."""
