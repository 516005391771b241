"""What `mode=evaluate` makes of trained weights, one file each; `zero.inference.config` lists them in their order."""
