"""Rewards: functions from responses to numbers, run in processes that can be killed (rewards/pool.py),
and composed (rewards/compose.py).
"""
