"""Profiles by NVIDIA's Nsight Systems: how one is taken, its export read back into the tables"""
