"""What is kept of each measurement: its record, the files of records, and what many of them say together."""
