// A launch as Python asks for it: the structures of emulator.py's ctypes, field by field.
#pragma once

#include "emulator.h"

namespace emulator {

enum Kind : int { VALUE, READ_ONLY, WRITABLE };

struct Argument {
  void* data;  // an array, or the bytes of a value; null for a null pointer
  u64 bytes;
  int kind;
};

struct Request {
  dim3 grid, block;
  u64 shared_bytes;
  u64 seed;
  int count;
  Argument* arguments;
};

struct Error {
  char message[1024];
  u64 offset;  // of the instruction in the library that failed, 0 if unknown
};

int launch(void (*kernel)(void** arguments), const Request& request, Error& error);

}  // namespace emulator
