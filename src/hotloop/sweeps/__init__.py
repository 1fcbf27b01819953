"""Sweeps: trials as processes of their own, the devices they get, what they try, their journal. It knows no family."""
