"""Profiles by NVIDIA's Nsight Systems: taken, exported, read back into the tables"""
