"""What runs on the devices: loss, schedules, the pmapped step, evaluation, inference. No input or output."""
