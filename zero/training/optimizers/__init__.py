"""The optimizers of the trainer: their table, their updates, and which leaves weight decay takes."""
