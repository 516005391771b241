"""Rewrites a function of whole arrays into one of shards, or names the operation that prevents it.

An optimizer is written for whole arrays. On shards an element-wise one is right, and any other is silently wrong: a
norm becomes the norm of a slice. So the function is traced on whole shapes, and an interpreter evaluates the jaxpr on
the device's arrays, each of which is whole or split along a dimension:

- an element-wise operation works on slices; a whole operand that meets a split one is sliced first;
- an operation that moves dimensions, or works along dimensions that are not split, moves the split too (`shapes`);
- a branch or a loop runs on slices if all of its operations do (`control`);
- everything else needs the other devices. Inside `across_shards` a reduction over the split dimension is completed by
  a collective (`reductions`), a loop or a factorization runs on one device, its owner, and an operation without a
  rule runs on gathered arrays. Elsewhere it is refused, by name.

Results are right by construction: sizes, masks and factorings that depend on a shape use the whole shape.
"""
