"""The sections of the report, each from a `View`; captions say what the numbers show."""
