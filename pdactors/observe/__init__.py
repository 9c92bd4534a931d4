"""What a running cluster shows: metrics and timelines."""
