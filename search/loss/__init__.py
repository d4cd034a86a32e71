"""What a profile costs: its calibration loss, evaluated in parallel and kept."""
