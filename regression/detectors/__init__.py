"""What the incidents share to see a fault: attention calls, oracles, counters, memory, the public API."""
