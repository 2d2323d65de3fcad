// Runs one function of a saved artifact, without Python, and prints its results.
//
// Build, in this folder, with one command; the headers and libraries come with apache-tvm:
//
//   L=$(python -c 'import tvm.libinfo as l; print(l.find_libtvm_runtime())') && g++ -O2 run.cpp -o run $(tvm-ffi-config --cxxflags --ldflags) -Wl,--no-as-needed $L -ltvm_ffi -Wl,-rpath,$(dirname $L):$(tvm-ffi-config --libdir)
//
// Run:
//
//   ./run FOLDER FUNCTION [SIZE=NUMBER...]
//
// Element i of each float argument is (i % 7 - 3) / 4, and i % 7 of each int argument. Each line of
// output is one result of the Relax function: its shape, then its elements.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace ffi = tvm::ffi;
namespace json = tvm::ffi::json;
using Sizes = std::map<std::string, int64_t>;

// --- JSON: what a manifest and the header of a weight file are written in -----------------------

json::Value Get(const json::Value& object, const char* key) {
  auto map = object.cast<json::Object>();
  auto found = map.find(ffi::String(key));
  if (found == map.end()) throw std::runtime_error(std::string("there is no key ") + key);
  return (*found).second;
}

std::string Text(const json::Value& object, const char* key) {
  return std::string(Get(object, key).cast<ffi::String>());
}

json::Array List(const json::Value& object, const char* key) {
  return Get(object, key).cast<json::Array>();
}

json::Value Named(const json::Array& list, const std::string& name) {
  for (const auto& item : list) {
    if (Text(item, "name") == name) return item;
  }
  throw std::runtime_error("there is no " + name);
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " cannot be read");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// Sizes are numbers or names here; fx2relax also writes expressions over names.
ffi::Shape ShapeOf(const json::Array& sizes, const Sizes& known) {
  std::vector<int64_t> found;
  for (const auto& size : sizes) {
    if (auto number = size.as<int64_t>()) {
      found.push_back(*number);
      continue;
    }
    auto named = known.find(std::string(size.cast<ffi::String>()));
    if (named == known.end()) {
      throw std::runtime_error("give the size " + std::string(size.cast<ffi::String>()) + "=...");
    }
    found.push_back(named->second);
  }
  return ffi::Shape(found.begin(), found.end());
}

// --- Tensors ------------------------------------------------------------------------------------

// Memory of somebody else's, which outlives the tensor.
struct Borrowed {
  void* data;
  void AllocData(DLTensor* tensor) { tensor->data = data; }
  void FreeData(DLTensor*) {}
};

// Memory of its own, of zeros, where TVM's vector instructions like it.
struct Owned {
  void AllocData(DLTensor* tensor) {
    size_t bytes = (ffi::GetDataSize(*tensor) + 63) / 64 * 64;
    tensor->data = std::aligned_alloc(64, bytes ? bytes : 64);
    std::memset(tensor->data, 0, bytes);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

const DLDevice kCpu{kDLCPU, 0};

ffi::Tensor Zeros(const ffi::Shape& shape, const std::string& dtype) {
  return ffi::Tensor::FromNDAlloc(Owned(), shape, ffi::StringToDLDataType(dtype), kCpu);
}

ffi::Tensor Filled(const ffi::Shape& shape, const std::string& dtype) {
  ffi::Tensor tensor = Zeros(shape, dtype);
  for (int64_t i = 0; i < shape.Product(); ++i) {
    if (dtype == "float32") {
      static_cast<float*>(tensor.data_ptr())[i] = static_cast<float>(i % 7 - 3) / 4;
    } else if (dtype == "int64") {
      static_cast<int64_t*>(tensor.data_ptr())[i] = i % 7;
    } else if (dtype == "int32") {
      static_cast<int32_t*>(tensor.data_ptr())[i] = static_cast<int32_t>(i % 7);
    } else {
      throw std::runtime_error("this example has no numbers of dtype " + dtype);
    }
  }
  return tensor;
}

void Print(const ffi::Tensor& tensor) {
  std::printf("[");
  for (int i = 0; i < tensor.ndim(); ++i) {
    std::printf(i ? ", %lld" : "%lld", static_cast<long long>(tensor.size(i)));
  }
  std::printf("]");
  std::string dtype = ffi::DLDataTypeToString(tensor.dtype());
  const char* data = static_cast<const char*>(tensor.data_ptr()) + tensor.byte_offset();
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    if (dtype == "float32") {
      std::printf(" %.9g", static_cast<double>(reinterpret_cast<const float*>(data)[i]));
    } else if (dtype == "int64") {
      std::printf(" %lld", static_cast<long long>(reinterpret_cast<const int64_t*>(data)[i]));
    } else if (dtype == "int32") {
      std::printf(" %d", reinterpret_cast<const int32_t*>(data)[i]);
    } else {
      std::printf(" (%s)", dtype.c_str());
      break;
    }
  }
  std::printf("\n");
}

// --- The weight file: safetensors, mapped into memory --------------------------------------------

class Weights {
 public:
  explicit Weights(const std::string& path) {
    int file = open(path.c_str(), O_RDONLY);
    struct stat status;
    if (file < 0 || fstat(file, &status) != 0) throw std::runtime_error(path + " cannot be read");
    size_t size = static_cast<size_t>(status.st_size);
    void* data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (data == MAP_FAILED) throw std::runtime_error(path + " cannot be mapped");
    data_ = static_cast<char*>(data);
    uint64_t length = 0;
    if (size >= 8) std::memcpy(&length, data_, 8);
    if (size < 8 || length > size - 8) throw std::runtime_error(path + " is cut off");
    header_ = json::Parse(ffi::String(data_ + 8, length));
    start_ = 8 + length;
    size_ = size;
  }

  ffi::Tensor Get(const std::string& name, const std::string& dtype) const {
    json::Value entry = ::Get(header_, name.c_str());
    ffi::Shape shape = ShapeOf(List(entry, "shape"), {});
    size_t begin = start_ + List(entry, "data_offsets")[0].cast<int64_t>();
    size_t end = start_ + List(entry, "data_offsets")[1].cast<int64_t>();
    if (end > size_) throw std::runtime_error("the weight file is cut off");
    return ffi::Tensor::FromNDAlloc(Borrowed{data_ + begin}, shape,
                                    ffi::StringToDLDataType(dtype), kCpu);
  }

 private:
  char* data_ = nullptr;
  size_t start_ = 0;
  size_t size_ = 0;
  json::Value header_;
};

// --- The artifact --------------------------------------------------------------------------------

ffi::Function Find(const ffi::Module& module, const std::string& name) {
  auto found = module->GetFunction(ffi::String(name));
  if (!found.has_value()) throw std::runtime_error("the library has no function " + name);
  return found.value();
}

ffi::Any Call(const ffi::Function& function, const std::vector<ffi::Any>& arguments) {
  std::vector<ffi::AnyView> views(arguments.begin(), arguments.end());
  ffi::Any result;
  function.CallPacked(ffi::PackedArgs(views.data(), static_cast<int32_t>(views.size())), &result);
  return result;
}

void Run(const std::string& folder, const std::string& name, const Sizes& sizes) {
  json::Value manifest = json::Parse(ffi::String(ReadFile(folder + "/manifest.json")));
  if (Get(manifest, "fx2relax_artifact").cast<int64_t>() != 1) {
    throw std::runtime_error("the artifact is of another format");
  }
  json::Value function = Named(List(manifest, "functions"), name);

  ffi::Module library = ffi::Module::LoadFromFile(
      ffi::String(folder + "/" + Text(Get(manifest, "library"), "name")));
  ffi::Module machine = Find(library, "vm_load_executable")().cast<ffi::Module>();
  const int kPooled = 2;
  Find(machine, "vm_initialization")(static_cast<int>(kDLCPU), 0, kPooled);

  Weights weights(folder + "/" + Text(Get(manifest, "weight_file"), "name"));
  std::vector<ffi::Any> arguments;
  for (const auto& parameter : List(function, "parameters")) {
    std::string kind = Text(parameter, "kind");
    if (kind == "tensor") {
      arguments.push_back(
          Filled(ShapeOf(List(parameter, "shape"), sizes), Text(parameter, "dtype")));
    } else if (kind == "size") {
      arguments.push_back(ShapeOf(List(parameter, "shape"), sizes));
    } else if (kind == "state") {
      json::Value state = Named(List(manifest, "states"), Text(parameter, "name"));
      std::string dtype = Text(state, "dtype");
      arguments.push_back(Get(state, "zeros").cast<bool>()
                              ? Zeros(ShapeOf(List(state, "shape"), {}), dtype)
                              : weights.Get(Text(state, "name"), dtype));
    } else {
      throw std::runtime_error("this example has no " + kind + " to give");
    }
  }

  std::vector<ffi::Any> given;
  for (const auto& item : List(function, "weights")) {
    json::Value weight = Named(List(manifest, "weights"), std::string(item.cast<ffi::String>()));
    std::string first = Text(weight, "same_as");
    given.push_back(
        weights.Get(first.empty() ? Text(weight, "name") : first, Text(weight, "dtype")));
  }
  std::string transform = Text(function, "transform");
  if (!transform.empty()) {
    // Work on weights alone, done once: the function takes its results in place of the weights.
    ffi::Array<ffi::Any> tuple(given.begin(), given.end());
    auto made = Find(machine, transform)(tuple).cast<ffi::Array<ffi::Any>>();
    given.assign(made.begin(), made.end());
    if (auto takes = Get(function, "takes").as<json::Array>()) {
      given.clear();
      for (const auto& index : *takes) given.push_back(made[index.cast<int64_t>()]);
    }
  }
  arguments.insert(arguments.end(), given.begin(), given.end());

  std::string symbol = Text(function, "symbol");
  ffi::Any result = Call(Find(machine, symbol.empty() ? name : symbol), arguments);
  if (auto tensor = result.as<ffi::Tensor>()) {
    Print(*tensor);
    return;
  }
  for (const auto& part : result.cast<ffi::Array<ffi::Any>>()) {
    if (auto tensor = part.as<ffi::Tensor>()) Print(*tensor);
  }
}

int main(int count, char** words) {
  if (count < 3) {
    std::fprintf(stderr, "usage: %s FOLDER FUNCTION [SIZE=NUMBER...]\n", words[0]);
    return 2;
  }
  Sizes sizes;
  for (int i = 3; i < count; ++i) {
    std::string word = words[i];
    size_t sign = word.find('=');
    if (sign == std::string::npos) {
      std::fprintf(stderr, "%s is not SIZE=NUMBER\n", words[i]);
      return 2;
    }
    sizes[word.substr(0, sign)] = std::stoll(word.substr(sign + 1));
  }
  try {
    Run(words[1], words[2], sizes);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
