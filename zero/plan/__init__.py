"""`mode=plan`: memory, traffic and time of a step, estimated by the compiler."""
