"""What one machine has measured: its page, and a page per mode and shape with charts and pictures."""
