"""The computation on devices: loss, schedules, the pmapped step, evaluation, inference. No I/O."""
