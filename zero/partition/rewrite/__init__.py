"""Rewrites a function of whole arrays into one of shards, or names the operation that prevents it.

An optimizer is written for whole arrays. Run on shards as it is, an element-wise one is right and any other is
silently wrong: a norm becomes the norm of a slice. So the function is traced on whole shapes, without computing
anything, and an interpreter of the jaxpr evaluates its operations one by one on what the device holds, each value known
to be whole or split along a dimension:

- an element-wise operation works on slices; a whole operand that meets a split one is sliced first;
- an operation that moves dimensions, or works along others than the split one, moves the split along (`shapes`);
- a branch or a loop runs on slices where all of its operations do (`control`);
- everything else needs the other devices. Inside `across_shards` a reduction over the split dimension is completed by
  a collective (`reductions`), a loop or a factorization runs on one device, which owns it, and an operation without a
  rule runs on gathered arrays. Elsewhere it is refused, by name.

Whatever passes is right by construction: sizes, masks and factorings that depend on a shape see the whole one.
"""
